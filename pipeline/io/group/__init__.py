"""The ranks of one instance on several hosts: the leader's side, the member's side, and what they say to each other."""
