"""Text generation: sampling, greedy search and beam search, and the decoding loop below them."""

from tensorgrad.models.generation.sampling import generate, generate_batch, stream
from tensorgrad.models.generation.search import beam_search, greedy_search

__all__ = ["beam_search", "generate", "generate_batch", "greedy_search", "stream"]
