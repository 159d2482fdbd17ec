"""Object stores and web servers: addresses, reading with retries, the local cache, uploading."""
