"""The model runtime: a stage of layers over a paged KV pool, the sampler, and checkpoint reading.

`engine` knows nothing of requests, daemons or transports. What the rest of the system needs to
know of it is in `batch.py` (what is asked), `stage.py` (a rank's layers), `kv_pool.py` (the memory
the transfer engine registers) and `sampler.py` (logits to tokens). `checkpoint.py` answers questions
about a model folder without importing torch.
"""
