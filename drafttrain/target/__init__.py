"""The frozen target: loading it, its passes and identity, what it writes (synthesis), the features
it gives (computed online, or captured in a store), and the adapter that joint training adds."""
