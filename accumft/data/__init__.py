"""Files, folders and the hub → tables → examples with labels → token ids → batches."""
