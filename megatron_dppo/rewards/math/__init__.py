"""The reward `math`: `reward.py` judges a response, `compare.py` and below compare two values."""
