"""Commands that evaluate a checkpoint: `medvl eval TASK`."""
