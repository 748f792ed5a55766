"""The command line: one module or folder for each verb. Nothing else imports it."""
