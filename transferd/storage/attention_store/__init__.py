"""Storage found by token ids: `storage.backend = "attention_store"` (docs/attention_store.md).

open.py is our own index over any keyed backend; sdk.py drives Baidu's AttentionStore through its
proprietary SDK where that is installed. Both keep the contract of storage/tokens.py.
"""
