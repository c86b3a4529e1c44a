"""Communication between processes: serialization, shared memory, channels, send/recv and collectives."""
