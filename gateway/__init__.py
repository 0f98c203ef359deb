"""The OpenAI-compatible HTTP front: routes each request to a prefill/decode pair and merges what both sides tell."""
