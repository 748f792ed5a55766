"""transferd moves an LLM engine's KV cache between device memory, pinned host memory and storage."""
