# mypy: ignore-errors
"""The language model of PyTorch's tutorial on transformers, with the attention written out."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


def generate_square_subsequent_mask(sz):
    return torch.triu(torch.full((sz, sz), float("-inf")), 1)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros((1, max_len, d_model))
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.shape[1]])


class SelfAttention(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.nhead = nhead
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, src, src_mask):
        batch, length, d_model = src.shape
        qkv = self.in_proj(src).view(batch, length, 3, self.nhead, d_model // self.nhead)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        output = F.scaled_dot_product_attention(query, key, value, src_mask)
        return self.out_proj(output.permute(0, 2, 1, 3).reshape(batch, length, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, d_hid, dropout):
        super().__init__()
        self.self_attn = SelfAttention(d_model, nhead)
        self.linear1 = nn.Linear(d_model, d_hid)
        self.linear2 = nn.Linear(d_hid, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src, src_mask):
        src = self.norm1(src + self.dropout(self.self_attn(src, src_mask)))
        hidden = self.dropout(F.relu(self.linear1(src)))
        return self.norm2(src + self.dropout(self.linear2(hidden)))


class TransformerModel(nn.Module):
    def __init__(self, ntoken, d_model, nhead, d_hid, nlayers, dropout=0.1):
        super().__init__()
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        layers = [EncoderLayer(d_model, nhead, d_hid, dropout) for _ in range(nlayers)]
        self.layers = nn.ModuleList(layers)
        self.embedding = nn.Embedding(ntoken, d_model)
        self.d_model = d_model
        self.linear = nn.Linear(d_model, ntoken)

    def forward(self, src):
        src_mask = generate_square_subsequent_mask(src.shape[1])
        src = self.pos_encoder(self.embedding(src) * math.sqrt(self.d_model))
        for layer in self.layers:
            src = layer(src, src_mask)
        return self.linear(src)


bptt, ntokens = 16, 20
train_data = (torch.arange(2048) ** 2 % 31 % ntokens).view(16, 128)  # (sequences, steps)
model = TransformerModel(ntokens, d_model=32, nhead=2, d_hid=64, nlayers=2, dropout=0.1)

criterion = nn.CrossEntropyLoss()
lr = 0.1  # learning rate
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)


def train(model):
    model.train()  # turn on train mode
    total_loss = 0.0
    starts = range(0, train_data.shape[1] - 1, bptt)
    for i in starts:
        seq_len = min(bptt, train_data.shape[1] - 1 - i)
        data = train_data[:, i : i + seq_len]
        targets = train_data[:, i + 1 : i + 1 + seq_len]
        output = model(data)
        loss = criterion(output.view(-1, ntokens), targets.reshape(-1))

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        total_loss += loss.item()
    return total_loss / len(starts)


losses = []
for epoch in range(1, 13):
    losses.append(train(model))
    print(f"| epoch {epoch:3d} | loss {losses[-1]:5.2f} | ppl {math.exp(losses[-1]):8.2f}")
    scheduler.step()
