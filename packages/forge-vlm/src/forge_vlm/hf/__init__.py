"""Models with images as folders in the Hugging Face format."""
