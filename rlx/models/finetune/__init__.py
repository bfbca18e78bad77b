"""Fine-tuning: models of files as differentiable functions, and what trains them.

training_model   a loaded model as a function of trainable parameters: loss, vectors
trained_weights  which weights are trained, frozen or adapted, and their first values
row_builder      the model builders for rows of training tokens
"""
