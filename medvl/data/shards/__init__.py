"""The shard format: manifest, index, reading, verification."""
