"""Pure parts that know no drafter: attention masks, layers and their cache, a causal LM driven
through it, sampling policies, losses over a vocabulary, frozen products packed for a CPU."""
