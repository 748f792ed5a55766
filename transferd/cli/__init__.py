"""The command line: one module or folder per verb. No other folder imports it."""
