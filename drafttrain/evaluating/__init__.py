"""evaluate's steps: what is compared, the measurements, whether decoding fits training, the tables.
The door `drafttrain.evaluate` calls them one after the other."""
