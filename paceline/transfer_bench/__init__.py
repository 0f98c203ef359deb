"""`paceline transfer-bench`: how much of what the machine can move does the real hand-over of KV reach?

`options` and `run` are the command; `pairs` starts two processes per backend (`member`), which are
`sending`, `receiving` or `reference`; `messages` is what they are told; `figures` defines the numbers.
"""
