"""The op table: what is known of each op, as data. Reading it is the policy's business."""
