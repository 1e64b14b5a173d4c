#pragma once
#define CUDART_NAN_F (__builtin_nanf(""))
#define CUDART_INF_F (__builtin_inff())
