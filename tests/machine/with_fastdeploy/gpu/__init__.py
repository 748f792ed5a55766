"""FastDeploy's own workers and cache messager, on a machine whose GPU is a double (machine.py); run by `check`."""
