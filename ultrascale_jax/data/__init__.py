"""Real text as batches of token ids: sources and tokenizers, token shards, packing by index."""
