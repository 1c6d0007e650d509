"""What a ranking is made from and judged by: sequences, candidates, texts, prompts, answers."""
