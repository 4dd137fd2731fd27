"""Files and offline batches: the store, the runner and what `caudal batch` shares with them."""
