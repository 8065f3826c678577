"""What can be told of graphs and runs: reports, casts and FLOPs as counted, advice, pictures (``render/``)."""
