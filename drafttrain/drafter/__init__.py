"""Drafters: the contract in `base`, bases by how the tokens of a draft depend on each other in
`growing` and `retrieval`, then one file a drafter."""
