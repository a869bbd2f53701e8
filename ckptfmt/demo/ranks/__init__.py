"""The same job on many ranks: FSDP2, a PostgreSQL catalog, a rank killed in mid-flush, fewer ranks that go on."""
