"""Model families, the weight table, and conversion to and from Hugging Face."""
