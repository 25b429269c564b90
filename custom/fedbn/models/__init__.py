"""What a hospital keeps: its complete model, a bundle of it, predictions, models for new sites."""
