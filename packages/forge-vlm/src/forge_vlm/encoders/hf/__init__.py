"""Published vision towers in the Hugging Face format: config.json and safetensors, no pickle and no foreign code."""
