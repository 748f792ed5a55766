"""The alert rules and the dashboard: every expression parses and names metrics that a daemon has."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from scripts import watched
from tests.observability.test_metrics import NoTransport
from tests.support.exposed import exposed
from tests.support.simulation.pool import SIM_MASTER, SimPool
from transferd.config import from_tree
from transferd.config.size import Size
from transferd.daemon.daemon import Daemon
from transferd.daemon.preflight import build
from transferd.observability.concerns import CONCERNS
from transferd.runtime.compat import tomllib
from transferd.storage.mooncake import MooncakeStorage

DEPLOY = Path(__file__).parent.parent / "deploy"
ALERTS = (DEPLOY / "prometheus" / "alerts.yml").read_text()
METRICS = (DEPLOY.parent / "docs" / "metrics.md").read_text()
DASHBOARD = json.loads((DEPLOY / "grafana" / "transferd.json").read_text())
RULES = re.findall(r"- alert: (\w+)\n\s+expr: (.+)\n", ALERTS)
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not there"
)


async def expositions(tmp_path: Path) -> list[str]:
    """What a daemon with a file store says, and one with a pool."""
    pages = []
    common = {"cache": {"device_blocks": 4, "host_blocks": 0}, "metrics": {"listen": ""}}
    pooled = from_tree(
        common | {"storage": {"backend": "mooncake", "mooncake": {"master_server_addr": SIM_MASTER}}},
    )
    filed = from_tree(common | {"storage": {"file": {"path": str(tmp_path / "blocks")}}})
    pool = MooncakeStorage.from_config(pooled, set_up=SimPool().set_up)
    pool._peers.down["10.0.0.2:15000"] = "no answer"  # a node that is up has no sample
    pool._copies._missing = 3  # unknown before the first look
    for config, storage in ((filed, None), (pooled, pool)):
        daemon = Daemon(config, transport=NoTransport(), storage=storage)
        pages.append(exposed(daemon))
        await daemon.stop(lambda: 5.0)
    return pages


async def test_every_expression_names_metrics_and_label_values_that_exist(tmp_path: Path) -> None:
    samples: dict[str, list[dict[str, str]]] = {"up": [{}]}
    for page in await expositions(tmp_path):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample.labels)
    assert len(RULES) == ALERTS.count("- alert:") >= 15
    for title, expression in RULES + PANELS:
        names = re.findall(r"\b((?:transferd|process)_\w+|up\b)", expression)
        assert names, title
        for name in names:
            assert name in samples or f"`{name}{{" in METRICS, f"{title}: nothing is called {name}"
        for name, selector in re.findall(r"\b((?:transferd|process)_\w+)\{([^}]*)\}", expression):
            for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', selector):
                if label in ("instance", "job") or value == "$engine":
                    continue
                known = {labels.get(label) for labels in samples.get(name, ())}
                for one in value.split("|") if operator == "=~" else [value]:
                    assert one in known, f'{title}: {name} has no {label}="{one}" at the start'


def test_each_concern_that_is_more_than_a_wish_has_its_alert_with_its_severity_and_remedy() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]
    alerted = {rule["expr"]: (rule["labels"]["severity"], rule["annotations"]["action"]) for rule in rules}
    for name, one in CONCERNS.items():
        found = alerted.get(f'transferd_concern{{concern="{name}"}} == 1')
        assert found == (None if one.severity == "info" else (one.severity, one.remedy)), name
    assert len({rule["alert"] for rule in rules}) == len(rules)


def test_a_panel_of_a_field_that_is_gone_is_an_error() -> None:
    gone = watched.Line("storage.levels.no_such_figure")
    with pytest.raises(KeyError, match="no_such_figure"):
        watched._query(gone, {})
    with pytest.raises(AssertionError, match="has no label"):
        watched._query(watched.Line("ready", ("engine",)), watched.OTHERS)


def test_every_alert_says_what_to_do() -> None:
    assert ALERTS.count("- alert:") == ALERTS.count("action: ") == ALERTS.count("severity: ")
    severities = set(re.findall(r"severity: (\w+)", ALERTS))
    assert severities == {"critical", "warning", "info"}


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


@needs_promtool
def test_promtool_accepts_the_rules_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = "groups:\n  - name: dashboard\n    rules:\n"
    for number, (_, expression) in enumerate(PANELS):
        plain = expression.replace("$__rate_interval", "5m")
        rules += f"      - record: panel:{number}\n        expr: '{plain}'\n"
    (tmp_path / "dashboard.yml").write_text(rules)
    files = [DEPLOY / "prometheus" / "alerts.yml", tmp_path / "dashboard.yml"]
    done = subprocess.run(
        ["promtool", "check", "rules", *files], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_metrics(tmp_path: Path) -> None:
    for page in asyncio.run(expositions(tmp_path)):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


POD_CONFIG, POD = yaml.safe_load_all((DEPLOY / "kubernetes" / "sidecar.yaml").read_text())
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()


def test_the_sidecars_configuration_fits_the_pod_around_it() -> None:
    config = from_tree(tomllib.loads(POD_CONFIG["data"]["transferd.toml"]))
    sizes, spec = build(config).sizes, POD["spec"]
    (sidecar,) = spec["initContainers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
    assert sizes.shared < parsed_size(volumes["shm"]["emptyDir"]["sizeLimit"])
    assert sizes.memory + 300 * 2**20 < parsed_size(sidecar["resources"]["limits"]["memory"])
    assert config.storage.file.capacity < parsed_size(volumes["blocks"]["emptyDir"]["sizeLimit"])
    assert spec["terminationGracePeriodSeconds"] > config.server.shutdown_timeout
    assert spec["shareProcessNamespace"]
    (port,) = sidecar["ports"]
    assert config.metrics.listen == f"0.0.0.0:{port['containerPort']}"
    (engine,) = spec["containers"]
    assert engine["env"] == [{"name": "TRANSFERD_ENDPOINT", "value": config.server.endpoint}]
    shared = [{mount["mountPath"] for mount in one["volumeMounts"]} for one in (sidecar, engine)]
    assert {"/dev/shm", str(Path(config.server.endpoints[0].removeprefix("ipc://")).parent)} <= shared[0] & shared[1]


def parsed_size(text: str) -> int:
    return int(Size.parse(f"{text}B"))  # Kubernetes writes GiB as Gi


async def test_the_pods_probes_ask_what_a_daemon_serves(tmp_path: Path) -> None:
    (sidecar,) = POD["spec"]["initContainers"]
    asked = {sidecar[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"/readyz", "/healthz"}
    config = from_tree({"storage": {"file": {"path": str(tmp_path / "blocks")}}, "metrics": {"listen": "127.0.0.1:0"}})
    daemon = Daemon(config, transport=NoTransport())
    assert daemon.reports.http is not None
    assert asked <= set(daemon.reports.http.routes)
    await daemon.stop(lambda: 5.0)


def test_the_container_file_copies_what_is_there_and_runs_what_is_installed() -> None:
    root = DEPLOY.parent
    for line in re.findall(r"^COPY (?!--from)(.*)$", CONTAINERFILE, re.MULTILINE):
        sources = line.split()[:-1]
        assert all((root / source).exists() for source in sources), line
    (config,) = re.findall(r'CMD \["serve", "--config", "(.*)"\]', CONTAINERFILE)
    assert f"COPY systemd/transferd.toml {config}" in CONTAINERFILE
    uid = POD["spec"]["securityContext"]["runAsUser"]
    assert f"USER {uid}:{uid}\n" in CONTAINERFILE
    assert f"--uid {uid}" in CONTAINERFILE
