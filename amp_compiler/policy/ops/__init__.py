"""The op table: what is known about each op, as data, which the policy reads."""
