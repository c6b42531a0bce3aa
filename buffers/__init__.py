"""Memory with fixed addresses and what goes into it: shapes, plan, datasets, batching, staging, arenas."""
