"""The definition of a pass, the facts that passes promise with their checks, and the pipeline that runs passes."""
