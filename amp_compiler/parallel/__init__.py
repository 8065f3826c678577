"""Training by several processes: what is divided among them, and what they exchange.

``spec`` holds what a user asks for, ``agreement`` compares the processes before anything is exchanged, and each way of
dividing the work is a file of its own (``data``: the batch; ``sharded``: the batch and the parameters).
"""
