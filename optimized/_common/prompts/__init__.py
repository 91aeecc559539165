"""What several methods do with a whole prompt: score its tokens, choose those that stay, and fill a cache."""
