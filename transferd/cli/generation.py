"""`transferd generation set`: for trainers and operators, when an engine serves new weights."""

from __future__ import annotations

from typing import Annotated

import typer

from transferd.cli.asking import AskedDaemon, asks

app = typer.Typer(name="generation", help="The generation of the weights that an engine serves.", no_args_is_help=True)


@app.command("set")
@asks(timeout=30.0)
def set_(
    daemon: AskedDaemon,
    name: Annotated[str, typer.Argument(help="The generation; part of every stored block's name.")],
    engine: Annotated[str, typer.Option("--engine", help="Whose (default: the engine of [cache]).")] = "",
) -> None:
    """Let an engine serve new weights: from now on it finds no block of any other generation.

    Returns once the engine's processes know the generation: it then also holds after a crash of the daemon. Run it as
    the engine's user, the daemon's user or root.
    """
    from transferd.config import DEFAULT_ENGINE

    daemon.ask(lambda client: client.set_generation(name), engine=engine)
    whose = engine or DEFAULT_ENGINE
    daemon.show({"engine": whose, "generation": name}, f"engine {whose} serves generation {name!r}")
