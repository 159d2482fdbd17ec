"""Writers of the phantom in the layouts of published corpora."""
