"""One example becomes rollouts: sampler, player, chat, rows; demonstrations."""
