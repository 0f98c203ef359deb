"""Who may speak with whom: the cluster's secrets, and channels and sockets that are protected with them.

The bottom of the house: every shell may import it, no module that decides does.
"""
