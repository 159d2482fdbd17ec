"""Commands that convert corpora to shards, and commands on shards."""
