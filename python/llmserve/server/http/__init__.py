"""HTTP itself: connections, heads, bodies as typed records, keys, errors as answers."""
