"""The adapter against FastDeploy's own source, unmodified; skipped, with the reason, where it is not installed.

`make fastdeploy-check` makes an environment that has it and runs these tests in it, for each version.
"""
