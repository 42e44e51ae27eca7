"""The steps of `fit`: settings become typed parts, parts become a job, a job is fitted and packed.
The configuration ends here: `settings` reads it, every later step takes `Parts` and `Job`."""
