"""Reward `math`: `reward.py` judges a response, `parser.py` reads two answers, `equality.py` compares them."""
