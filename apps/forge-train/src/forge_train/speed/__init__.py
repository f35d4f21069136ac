"""What share of a device's speed the products of a model take."""
