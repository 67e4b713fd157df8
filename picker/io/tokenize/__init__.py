"""Ways to turn a request into the token ids that its engine computes, and the chain that tries them in order."""
