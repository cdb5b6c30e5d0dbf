"""`llmserve route`: one address for several servers, whose streams outlive their servers."""
