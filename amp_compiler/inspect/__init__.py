"""What users can read about graphs and runs: reports, counts of casts and FLOPs, advice, pictures (``render/``)."""
