output "url" {
  description = "Where clients call."
  value       = "https://${var.host}"
}

output "profile" {
  description = "Makes the profile of this cluster for the `sllm` command; the token is asked of the parameter store, by who may read it."
  value       = "SLLM_TOKEN=$(aws ssm get-parameter --region ${var.region} --name ${var.parameter_prefix}/gateway/token --with-decryption --query Parameter.Value --output text | head -n 1) SLLM_URL=https://${var.host} sllm profile set ${var.name}"
}

output "balancer_dns_name" {
  description = "What host is an alias of, where zone_id is not given."
  value       = aws_lb.this.dns_name
}

output "role_name" {
  description = "Role of the machines with gateways and controllers."
  value       = aws_iam_role.gateway.name
}
