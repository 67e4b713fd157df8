"""A GPU-less inference engine to route to: a paged prefix cache, a latency model and an OpenAI face."""
