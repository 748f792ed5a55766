"""The models of servers in tests, for SGLANG_EXTERNAL_MODEL_PACKAGE: with it, SGLang imports no other ones."""
