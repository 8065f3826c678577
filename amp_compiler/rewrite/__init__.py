"""What a pass is, the facts that passes promise and their checks, and how passes are run in order."""
