"""Storage that finds blocks by token ids: `storage.backend = "attention_store"` (docs/attention_store.md).

open_index.py is our own index over any keyed backend. sdk.py drives Baidu's AttentionStore through its
proprietary SDK, if that is installed. Both implement the contract of storage/tokens.py.
"""
